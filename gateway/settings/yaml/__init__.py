"""YAML text → values with their positions, and errors that name the line."""
