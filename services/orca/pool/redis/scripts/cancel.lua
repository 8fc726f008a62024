-- cancel: end all requests of the parent that have not ended, whoever owns them.
-- ARGV: parent.
begin(false)
end_parent(ARGV[1], 'cancelled')
publish()
