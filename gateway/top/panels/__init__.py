"""The panels of ``tensorgate top``: the lines of each, from a document of the admin address."""
