"""The composition root: settings → a running gateway, its reloads, and checks before it runs."""
