"""Django: a limit for everybody, and a tighter one for logins that fail. (Of a project, it is the file wsgi.py.)

    gunicorn --chdir examples --threads 4 django_app

Then try more often than it allows: curl -i -X POST localhost:8000/login
"""

from secrets import token_urlsafe

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path

from headgate.edges.wsgi import RateLimitMiddleware

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["localhost", "127.0.0.1"], SECRET_KEY=token_urlsafe())


def home(request: HttpRequest) -> HttpResponse:
    return HttpResponse("hello")


def login(request: HttpRequest) -> HttpResponse:
    right = request.headers.get("x-password") == "secret"
    return HttpResponse("welcome" if right else "wrong password", status=200 if right else 401)


urlpatterns = [path("", home), path("login", login)]

application = get_wsgi_application()
# Each client address: 100 requests a minute, and 3 logins that fail. Those that succeed are given back.
application = RateLimitMiddleware(application, "100/minute")
application = RateLimitMiddleware(application, "unlimited", routes={"POST /login": "3/minute"}, counts="failures")
