"""Real deployment: every client keeps its data and its personal model on a machine of its own, and Flower carries the
messages.

    settings    what the operator configures, the same at the server and at every node
    scaffold    the folder of an app, with a configuration to edit
    certs       keys and certificates
    wire        what is in a message, and how trees of tensors are put into it
    exchange    questions to nodes and their answers, over any transport
    node_data   how a node loads its own examples
    vault       where a node keeps its personal state and model
    node        what a node does when the server asks
    enrol       who takes part, and the scaling that all share
    node_pool   the pool of all nodes, as the server loop sees it
    server      a whole run on the server's side
    flower      Flower's grid and apps around all of this; the only part that needs Flower
"""
