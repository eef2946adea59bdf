"""Real deployment: every client keeps its data and its personal model on a machine of its own, and Flower carries the
messages.

    settings    what the operator configures, the same at the server and at every node
    app_folder  the folder of an app, with a configuration to edit
    certs       keys and certificates
    wire        what is in a message, and how trees of tensors are put into it
    exchange    questions to nodes and their answers, over any transport
    node_data   how a node loads its own examples
    rules       what a node will ever answer: its owner's configuration
    books       what private training was ever asked of a client
    client_keys who a client is: the key that signs its greeting
    greeting    what a client says of itself, checked
    vault       where a node keeps its personal state and model, and its books
    questions   a question from when it is read until its answer may leave: noise of its own, books, budget
    node        what a node does when the server asks
    enrol       who takes part, and the scaling that all share
    node_pool   the pool of all nodes, as the server loop sees it
    server      a whole run on the server's side
    flower      Flower's grid and apps around all of this; the only part that needs Flower
"""
