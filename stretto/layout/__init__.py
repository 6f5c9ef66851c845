"""Where everything lies: ranks on a mesh, tensors cut into boxes, and what ZeRO cuts when. No torch."""
