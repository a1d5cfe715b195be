"""Write README's "How it compares", and its chart, from `benchmarks/results`."""

from benchmarks import chart, comparison


def main() -> None:
    """Both."""
    chart.draw(comparison.read("tasks"))
    readme = comparison.ROOT / "README.md"
    readme.write_text(comparison.in_readme(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
