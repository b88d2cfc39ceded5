"""Django: a general limit, and a tighter one for failed logins. (In a project, this is the file wsgi.py.)

    gunicorn --chdir examples --threads 4 django_app

Then exceed the limit: curl -i -X POST localhost:8000/login
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
# Each client address: 100 requests a minute, and 3 failed logins. Successful ones are refunded.
application = RateLimitMiddleware(application, "100/minute")
application = RateLimitMiddleware(application, "unlimited", routes={"POST /login": "3/minute"}, counts="failures")
