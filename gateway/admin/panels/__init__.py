"""The panels of the operator's page: what each one shows, as a document."""
