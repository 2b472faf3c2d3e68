"""A rank's acts: what it does, in words, beside those of Comm."""

STARTING, COMPUTING, WRITING, FINISHED = "starting up", "computing", "writing its result", "finished"


def by_itself(act: str) -> bool:
    """Whether a rank in this act waits for no peer. Comm may say what is computed: "computing mlp"."""
    return act.startswith((STARTING, COMPUTING, WRITING))


def in_words(act: str) -> str:
    return f"was {act if by_itself(act) or act.startswith('waiting') else f'last in {act}'}"
