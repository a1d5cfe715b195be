"""The stage plays the story of the shop, records and draws it. None of it is the example."""
