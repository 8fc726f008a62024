"""Clients that send calls to a running system and record every answer."""
