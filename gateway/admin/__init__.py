"""The admin address: liveness, readiness, status and metrics, for operators."""
