"""What operators watch: statistics, metrics, telemetry, alerts and webhooks."""
