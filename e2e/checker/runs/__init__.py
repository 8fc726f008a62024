"""One run: a system under load, a disturbance of it, and a verdict."""
