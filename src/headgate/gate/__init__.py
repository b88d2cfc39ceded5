"""A policy of limits, applied to agents and addresses."""

from headgate.gate.gate import Gate
from headgate.gate.policy import Policy, PolicyError

__all__ = ["Gate", "Policy", "PolicyError"]
