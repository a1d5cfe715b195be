"""Write the comparison, README's part of it, the chart, and `docs/reference/scale.md`, from `benchmarks/results`."""

from benchmarks import chart, comparison, scale_page


def main() -> None:
    """All of them."""
    chart.draw(comparison.read("tasks"))
    beside = comparison.PAGE
    beside.write_text(comparison.in_page(beside.read_text(encoding="utf-8")), encoding="utf-8")
    readme = comparison.ROOT / "README.md"
    readme.write_text(comparison.in_readme(readme.read_text(encoding="utf-8")), encoding="utf-8")
    page = comparison.ROOT / "docs" / scale_page.PAGE
    page.write_text(scale_page.in_page(page.read_text(encoding="utf-8"), comparison.read("scale")), encoding="utf-8")


if __name__ == "__main__":
    main()
