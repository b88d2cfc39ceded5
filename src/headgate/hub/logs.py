"""What the hub logs, and how: one line for each event, for people or as JSON. No token is ever in it."""

import logging
import logging.config
import sys
from typing import Any

import structlog
from structlog.tracebacks import ExceptionDictTransformer

from headgate.hub.settings import HubSettings


def configure(settings: HubSettings) -> None:
    """Let everything that is logged, by whichever library, come out in one form on standard error."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks come without the values of variables, which hold tokens.
    if settings.log_format == "json":
        tracebacks = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
        last = [tracebacks, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    form = {
        "()": structlog.stdlib.ProcessorFormatter,
        "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        "foreign_pre_chain": shared,
    }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": form},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": sys.stderr}},
            "root": {"handlers": ["stderr"], "level": "WARNING"},
            "loggers": {
                "headgate": {"level": settings.log_level.upper()},
                # Not its lines about single connections: whoever sends nonsense could fill the log with them.
                "uvicorn": {"level": "ERROR"},
            },
        }
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
