"""What a chapter asserts is told as well as what a test does."""

import pytest

pytest.register_assert_rewrite("tests.contract.asking", "tests.contract.chapters")
