"""Real deployment: every client keeps its data and its personal model on a machine of its own, and Flower carries the
messages.

    settings    what the operator configures, the same at the server and at every node
    data        how a node loads its own examples
    vault       where a node keeps its personal state and model
    wire        what is in a message, and how trees of tensors are put into it
    node        what a node does when asked
    pool        the pool of all nodes, as the server loop sees it
    server      a whole run on the server's side
    flower      Flower's grid and apps around all of this; the only part that needs Flower
"""
