"""The command line: `ziggurat <verb>`. Modules here import torch only when a verb needs it."""
