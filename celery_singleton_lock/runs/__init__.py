"""One execution of a task, and the message it came by; knows no policy."""
