"""One core for every memory tier: what stays, who has it, who waits for room, who loads. Pure: no clock, no I/O."""
