"""Kubernetes itself: its components, what configures them, and what the cluster serves."""
