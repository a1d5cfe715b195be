"""What shows the shop: who records, who draws, and the story that is played. None of it is the example."""
