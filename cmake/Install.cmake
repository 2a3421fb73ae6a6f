# Install rules and the umbrella target are added here.
