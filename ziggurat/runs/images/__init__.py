"""Images: vectors of pictures for any model, and the scale model that makes them cheaper."""
