"""Monitoring: health, statistics, metrics, telemetry, alerts and webhooks."""
