"""Settings: load the operator's YAML file, and report all its errors at once."""
