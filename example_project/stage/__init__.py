"""The stage shows the shop: it plays the story, records and draws. None of it is the example."""
