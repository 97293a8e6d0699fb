"""Settings reload: source, loaded files, differences, revision."""
