"""Tools that measure, predict and prepare; no lower room imports them."""
