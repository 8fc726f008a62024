"""Pure rules over a history, and the verdict that combines them."""
