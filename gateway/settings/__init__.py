"""Settings: what an operator writes in YAML, checked whole before anything starts."""
