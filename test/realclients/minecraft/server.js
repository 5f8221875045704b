// A Minecraft server without a world: server.js PORT MOTD
const mc = require('minecraft-protocol')
const [port, motd] = process.argv.slice(2)
mc.createServer({ host: '127.0.0.1', port: Number(port), motd, version: '1.20.4', 'online-mode': false })
