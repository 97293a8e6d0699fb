"""``tensorgate top``: the operator's page in a terminal, over the admin address."""
