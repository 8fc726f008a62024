"""Names of the formats in which models write tool calls and reasoning. The gateway has a table for each.

Those who start gateways write these names: `--tool-format`, `--reasoning-format`, and `spec.model`.
"""

AUTO_FORMAT = "auto"
"""Stands for the table that fits the model's chat template."""
NO_FORMAT = "none"
"""Stands for no table: all that the model writes is text."""

TOOL_FORMATS = (AUTO_FORMAT, NO_FORMAT, "hermes", "llama3_json", "mistral", "mistral_args", "qwen3_xml")
REASONING_FORMATS = (AUTO_FORMAT, NO_FORMAT, "think")
