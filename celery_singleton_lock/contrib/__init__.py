"""Parts for other frameworks; each is imported by those who use it, and by nothing else."""
