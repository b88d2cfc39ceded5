"""Flask: a general limit, and a tighter one per sender of messages.

    flask --app examples/flask_app.py run

Then exceed the limit: curl -i -X POST localhost:5000/messages/bob
"""

from flask import Flask

from headgate import RateLimited
from headgate.edges.decorator import rate_limited, too_many_requests
from headgate.edges.wsgi import RateLimitMiddleware

app = Flask(__name__)
# Each client address. Several processes share a limit with Limiter("100/minute", store="redis://localhost").
app.wsgi_app = RateLimitMiddleware(app.wsgi_app, "100/minute", skip=["/health"])  # type: ignore[method-assign]
app.register_error_handler(RateLimited, too_many_requests)


@app.post("/messages/<sender>")
@rate_limited("3/minute", key="sender")
def send(sender: str) -> dict[str, str]:
    return {"sent by": sender}


@app.get("/health")
def health() -> str:
    return "well"
