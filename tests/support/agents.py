"""Traffic of agents at a gate."""

from headgate import Decision, Gate


def check_until_denied(gate: Gate, agent: str, channel: str = "ws", tier: str = "heavy") -> Decision:
    """Check until denied; return the denial."""
    while True:
        decision = gate.check(agent, channel, tier)
        if not decision:
            return decision
