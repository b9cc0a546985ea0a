"""The drawings of docs/, by what they show; tools/draw_docs.py writes them."""
