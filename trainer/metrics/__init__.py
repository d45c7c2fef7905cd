"""How a run goes: speed, health, where it stands, lines for people."""
