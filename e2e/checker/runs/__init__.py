"""One run: a system under load, a disturbance, and a verdict."""
