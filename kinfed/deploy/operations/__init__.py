"""Operating a deployment: health, metrics, alerts, lines of logs, the audit log, the doctor."""
