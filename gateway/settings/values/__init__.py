"""Single values of the settings: addresses, sizes, durations, patterns."""
