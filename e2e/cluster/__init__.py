"""A real Kubernetes on one machine, without a registry or Docker, for the end-to-end tests: see README.md."""
