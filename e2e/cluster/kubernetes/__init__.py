"""Kubernetes itself: its components, their configuration, and the cluster's own services."""
