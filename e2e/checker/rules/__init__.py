"""Pure rules over a history, and the verdict that they add up to."""
