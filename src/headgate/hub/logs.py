"""The configuration of logging: one line per event, for people or as JSON. No token is ever logged."""

import logging
import logging.config
import sys
from typing import Any, Final

import structlog
from structlog.tracebacks import ExceptionDictTransformer

from headgate.hub.settings import HubSettings

_log: Final = structlog.get_logger("headgate.hub")


def configure(settings: HubSettings) -> None:
    """Write the logs of all libraries to standard error, in one format."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without the values of variables, which may hold tokens.
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
                # Without its lines about single connections: any client could fill the log with them.
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


def set_level(level: str, by: str) -> None:
    """Log from another level on, one of `LOG_LEVELS`, until the hub stops."""
    logger, number = logging.getLogger("headgate"), logging.getLevelNamesMapping()[level.upper()]
    logger.setLevel(min(number, logger.getEffectiveLevel()))  # so that the line is written, whichever is lower
    _log.warning("log level changed", to=level, by=by)
    logger.setLevel(number)
