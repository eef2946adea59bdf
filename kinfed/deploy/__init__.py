"""Real deployment: every client keeps its data and its personal model on a machine of its own, and Flower carries the
messages.

    settings    what the operator configures, the same at the server and at every node
    app_folder  the folder of an app, with a configuration to edit
    certs       keys and certificates
    wire        what is in a message, and how trees of tensors are put into it
    presence    what is known of every client's connection, and when the log speaks of it
    exchange    questions to nodes and their answers, over any transport
    status      what a deployment does now: a file that the server's part writes
    node_settings what the operator of a node configures
    node_data   how a node loads its own examples
    rules       what a node will ever answer: its owner's configuration
    books       what private training was ever asked of a client
    client_keys who a client is: the key that signs its greeting
    greeting    what a client says of itself, checked
    vault       where a node keeps its personal state and model, and its books
    vault_entry what it keeps of one client in one run
    questions   a question from when it is read until its answer may leave: noise of its own, books, budget
    preparation what an answer is computed from
    node_errors what a node tells of its errors
    secure_memory, secure_session, secure_round, secure_messages, masks, secure_pool  secure sums, at client and server
    node        what a node does when the server asks
    enrol       who takes part, and the scaling that all share
    answer_checks what clients' answers may say
    node_pool   the pool of all nodes, as the server loop sees it
    server      a whole run on the server's side
    flower      Flower's grid and apps around all of this; the only part that imports Flower
    processes   Flower's programs, started and stopped together
    warm_worker one process that has imported everything, and does Flower's tasks in forks of itself
    supervised  a program of Flower that is started again whenever it ends, beside a warm worker
    site_kit    what a site needs to join, in one folder
    node_start  a node from one file: supernode and warm worker, kept running
    server_start the server from its certificates: superlink and warm worker, kept running
    trial       a whole deployment on one machine
    trial_sites the sites and settings that a trial deploys
"""
