from kinfed.board.board_server import BoardServer as BoardServer
