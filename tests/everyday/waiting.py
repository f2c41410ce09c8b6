"""Loops that wait for something that is not there yet, by topic. Empty in a release."""

WAITING: dict[tuple[str, str], str] = {
    ("TRL guides: Dr. GRPO, divided by batch size times maximal length", "record"): "lead",
    ("TRL guides: Dr. GRPO, divided by batch size times maximal length", "monitor"): "lead",
    ("Habits of loops: gradient accumulation inside one block", "record"): "layouts",
}
