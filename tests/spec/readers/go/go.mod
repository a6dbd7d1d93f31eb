module kvbus/spec/reader

go 1.19
