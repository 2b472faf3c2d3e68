"""How the messages of a Comm travel: between threads of one process (`threads`) or between processes (`processes`)."""
