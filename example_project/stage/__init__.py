"""What the demo needs beside the shop: processes to start and kill, a browser, and a list of promises to check."""
